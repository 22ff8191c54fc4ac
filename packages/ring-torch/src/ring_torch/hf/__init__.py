"""Context-parallel attention for the models of transformers 5.

:func:`parallelize` prepares a model or a Trainer in one call: it sets ring attention as the model's
``attn_implementation`` and installs forward hooks that split each batch and join the results.

The same can be done by hand: :func:`register` adds ring attention to transformers, and
:func:`shard_batch` splits a batch. The split batch carries, in place of ``attention_mask``, an
object that says which ranks hold the sequence and where its documents are. There is no global
state, so one process may use several models and several process groups. Doing one half alone is an
error: other attention implementations cannot read such a mask, and ring attention accepts no other.
"""

from ring_torch.hf.batch import shard_batch
from ring_torch.hf.cached import ShardedCache
from ring_torch.hf.models.check import ModelReport, check_model
from ring_torch.hf.parallelize import Handle, fsdp2, parallelize, verify
from ring_torch.hf.register import register
from ring_torch.verification.judgement import Difference, VerifyReport

__all__ = [
    "Difference", "Handle", "ModelReport", "ShardedCache", "VerifyReport", "check_model", "fsdp2", "parallelize",
    "register", "shard_batch", "verify",
]  # fmt: skip
