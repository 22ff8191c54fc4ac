"""What benchmarks of either framework share: needs no framework, no GPU.

``cases`` says what is timed, ``turns`` in what order, which results are right, and what is kept of
times; ``report`` has options, files and environments; ``tables`` and ``chart`` show what a file
holds, and ``pages`` writes them into the pages; ``numerics`` is the error of the simulated ring.
"""
