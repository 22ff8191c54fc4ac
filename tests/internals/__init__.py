"""The private names of the packages that tests use: no other file here names a private module.

What users import, tests import from where users do. A file for each package, as each can be
installed without the others; and one for what of a package needs Triton or transformers, which
are not everywhere, take seconds to import, or read settings when they are.
"""
