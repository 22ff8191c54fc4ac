"""How keys travel: the choice, and why not."""

from __future__ import annotations

from ring_core import Plan, UnsupportedError, checks
from ring_jax._sides import of_others

#: ``ppermute``: round the ring, in steps. ``gather``: all of them to every device, at once.
TRANSPORTS = ("auto", "ppermute", "gather")


def choose_transport(transport: str, plan: Plan) -> str:
    """The transport a call named; ``auto`` goes round the ring.

    Raises:
        ValueError: No such transport.
        UnsupportedError: The one named cannot do this call.
    """
    checks.check_choice("transport", transport, TRANSPORTS)
    if transport != "gather":
        return "ppermute"
    if reasons := _refusals(plan):
        raise UnsupportedError(
            f"transport 'gather': {'; '.join(reasons)}. Instead: use transport='ppermute' or 'auto'"
        )
    return transport


def _refusals(plan: Plan) -> list[str]:
    """Why keys cannot be gathered."""
    reasons = []
    if any(step.helps != "none" for step in plan.steps):
        reasons.append(f"schedule {plan.schedule!r} moves queries to where the keys are")
    if plan.blocks is not None:
        reasons.append("a predicate mask is planned in tiles of each rank's own keys")
        return reasons
    others = of_others(plan)
    if others is not None and others.has_documents and plan.k_layout.name != "contiguous":
        reasons.append(
            f"packed documents and chunks have to lie in natural order, and schedule "
            f"{plan.schedule!r} deals tokens out otherwise (schedule='plain' does not)"
        )
    return reasons
