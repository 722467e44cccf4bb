"""The Bradley-Terry model of preferences: pure functions. Dimension suffix: P pairs."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def preference_losses(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """-log P(chosen beats rejected) = -log sigmoid(r_chosen - r_rejected), in nats, for each pair.

    InstructGPT (arXiv:2203.02155), equation 1, with one pair per prompt.
    """
    return -logsigmoid(chosen_P - rejected_P)
