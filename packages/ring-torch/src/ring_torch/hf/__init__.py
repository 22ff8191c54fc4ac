"""Ring attention for the models of transformers 5: an attention and a mask function.

What ties a model to a ring is the batch: :func:`shard_batch` puts who
holds the sequence, and its documents, in the place of ``attention_mask``. So nothing here has
state, models and rings may be mixed, and half of the change alone is an error: other attention
cannot read such a mask, and this one takes no other. :func:`parallelize` makes both changes, with
hooks on the model, and what has to be done to a Trainer.
"""

from ring_torch.hf.batch import shard_batch
from ring_torch.hf.models.check import ModelReport, check_model
from ring_torch.hf.parallelize import Handle, parallelize, verify
from ring_torch.hf.register import register
from ring_torch.hf.verification.judgement import VerifyReport
from ring_torch.hf.verification.trace import Difference

__all__ = [
    "Difference", "Handle", "ModelReport", "VerifyReport", "check_model", "parallelize", "register", "shard_batch",
    "verify",
]  # fmt: skip
