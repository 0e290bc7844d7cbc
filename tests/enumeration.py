"""Every outcome of a random program, with its exact probability: run the program once for each path of draws."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class ScriptedDraws:
    """Follows a script of outcomes, takes the first possible one after its end, and notes the others."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.path: list[int] = []
        self.probability = 1.0
        self.open_paths: list[list[int]] = []

    def _branch(self, weights: list[float]) -> int:
        possible = [outcome for outcome, weight in enumerate(weights) if weight > 0]
        depth = len(self.path)
        if depth < len(self.script):
            outcome = self.script[depth]
        else:
            outcome, *others = possible
            self.open_paths += [[*self.path, other] for other in others]
        self.path.append(outcome)
        self.probability *= weights[outcome] / sum(weights)
        return outcome

    def accept(self, prob: Tensor) -> Tensor:
        return torch.tensor([[bool(self._branch([1 - x, x])) for x in row] for row in prob.tolist()]).reshape(
            prob.shape
        )

    def choose(self, probs: Tensor, position: int) -> Tensor:
        return torch.tensor([[self._branch(row) for row in places] for places in probs.tolist()])


def exact_law(program: Callable[[ScriptedDraws], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """The law of what `program` returns."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    open_paths: list[list[int]] = [[]]
    while open_paths:
        draws = ScriptedDraws(open_paths.pop())
        law[program(draws)] += draws.probability
        open_paths += draws.open_paths
    return dict(law)


def largest_difference(one: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())
