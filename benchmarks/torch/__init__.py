"""Benchmarks of ring-torch: ``scaling`` over GPUs, ``options`` on one, ``model`` of a whole step.

``methods`` has the methods to time, ours and others'; ``recurrent`` times recurrent layers,
``decode`` attention over pages, ``heads`` losses and log-probabilities without logits;
``bench_command`` keeps what ``python -m ring_torch bench`` prints.
"""
