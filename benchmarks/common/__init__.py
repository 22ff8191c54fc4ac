"""The harness that benchmarks of both frameworks share; it needs no framework and no GPU.

``cases`` has the settings and rows to time. ``turns`` selects methods whose results are right, and
times them in rounds. ``report`` has command lines, result files and descriptions of environments.
``tables`` show a result file, and ``pages`` writes them, and charts, into the docs.
"""
