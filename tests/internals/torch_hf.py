"""Of ring_torch, what needs transformers."""

from ring_torch.compat import hf as compat_hf
from ring_torch.compat.hf import RingFlashAttention as RingFlashAttention
from ring_torch.hf import batch as batch_by_hand, scores as scores, wiring as wiring
from ring_torch.hf.batch import _REPORTS as _REPORTS
from ring_torch.hf.models import (
    classes as classes,
    hooks as hooks,
    parts as parts,
    releases as releases,
)
from ring_torch.hf.models.code import _undecorated as _undecorated
from ring_torch.hf.models.documents import stated_documents as stated_documents
from ring_torch.hf.models.releases import TESTED_RELEASES as TESTED_RELEASES
from ring_torch.hf.register import _layer_seed as _layer_seed
