"""Code that the benchmarks of both frameworks share; it needs no framework and no GPU.

``cases`` has the settings and rows to time. ``turns`` times methods in rounds, selects those whose
results are right, and makes the rows of options. ``report`` has command-line options, result files
and descriptions of environments. ``tables`` and ``chart`` show a result file, and ``pages`` writes
them into the docs.
"""
