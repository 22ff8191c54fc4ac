"""How bytes move: messages, copies between GPUs, one kernel each way.

May import ``kernels``, ``payload``, ``comm`` and what is below. A new transport is one file here,
and a line in ``TRANSPORTS`` of ``strategies/sessions.py``.
"""
