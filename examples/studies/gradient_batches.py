"""Gradients of estimators on batches of the gradient study, and on batches of the policy itself.

Legend: E estimators, M batches, B samples, T steps of the SDE window, P trained numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from estimators import Estimator, Pair, estimands
from flow import GUIDANCE, Sampler, weighted_gradients
from gradient_coefficients import all_coefficients
from gradient_problem import Evaluation, Problem, evaluate, plain
from torch import Tensor

from flowgrpo_rc import DiffusionBatch

LEARNING_RATE = 2e-3  # of the on-policy updates that lead to the policy of the study
CALIBRATION = 4  # batches that calibrate a mismatch

Lora = dict[str, Tensor]


class Gradients(NamedTuple):
    """The gradients of each estimator, one row for each batch.

    Attributes:
      reward: estimator -> gradients for the rewards, [M, P].
      chance: estimator -> gradients for the rewards dealt out at random, [M, P].
      to_rollout: gradients of the mean KL from the rollout, [M, P].
      metrics: estimator -> means of its metrics.
    """

    reward: dict[str, Tensor]
    chance: dict[str, Tensor]
    to_rollout: Tensor
    metrics: dict[str, dict[str, Any]]


class Collector:
    """Collects the gradients of one policy, batch by batch.

    Args:
      policy: the policy that would be updated.
      given: the estimators by name.
    """

    def __init__(self, policy: Sampler, given: Mapping[str, Estimator]) -> None:
        self._policy = policy
        self._given = given
        self._rows: list[Tensor] = []
        self._metrics: list[dict[str, dict[str, Any]]] = []

    def add(
        self,
        batch: DiffusionBatch,
        rewards: Tensor,
        index: int,
        before: Evaluation,
        now: Evaluation,
    ) -> None:
        """Adds a batch.

        Args:
          batch: the batch.
          rewards: reward of each sample, [B].
          index: number of the batch, which the random order of the rewards follows from.
          before: the policy before any update, on the batch.
          now: the policy that would be updated, on the batch.
        """
        found, metrics = all_coefficients(self._given, batch, rewards, index, before, now)
        mean = torch.zeros(3, 1, *now.log_probs.shape, dtype=torch.float64)
        if found[1].any():
            mean[1] = 1 / now.log_probs.numel()
        coefficients = torch.cat([found, mean], 1)
        self._rows.append(weighted_gradients(self._policy, batch, now.slopes, coefficients))
        self._metrics.append(metrics)

    def gradients(self) -> Gradients:
        """Returns the gradients on all batches."""
        columns = torch.stack(self._rows, 1)
        pairs = dict(zip(self._given, columns[:-1].unflatten(0, (-1, 2)), strict=True))
        means = {}
        for name in self._given:
            found = [one[name] for one in self._metrics]
            means[name] = {key: _mean([one[key] for one in found]) for key in found[0]}
        return Gradients(
            {name: pair[0] for name, pair in pairs.items()},
            {name: pair[1] for name, pair in pairs.items()},
            columns[-1],
            means,
        )


class Study:
    """One problem: the trained policy, its older versions, and the policy one update later.

    Args:
      elements: number of elements of a sample.
      seed: of the problem.
      fit: updates that fit the flow to the data.
      moves: on-policy updates that move the policy.
    """

    def __init__(self, elements: int, seed: int, *, fit: int, moves: int) -> None:
        self.problem = Problem(elements, seed)
        self.problem.fit(fit)
        self.reward_by_update: list[float] = []
        *self.versions, after = self._move(moves + 1)
        self.policy = self._at(self.versions[-1])
        self.moved = self._at(after)

    def _move(self, count: int) -> list[Lora]:
        """Trains by FlowGRPO on the policy's own samples; returns the LoRA after each update."""
        problem = self.problem
        given = {"flow_grpo": estimands()["flow_grpo"]}
        lora = Sampler(network=problem.network).lora()
        optimizer = torch.optim.Adam(list(lora.values()), lr=LEARNING_RATE)
        versions = []
        for index in range(count):
            policy = Sampler(network=problem.network)
            batch, rewards = problem.rollout(policy, index, "move")
            found = evaluate(policy, batch)
            collector = Collector(policy, given)
            collector.add(batch, rewards, index, found, found)
            gradient = collector.gradients().reward["flow_grpo"][0]
            parts = gradient.split([parameter.numel() for parameter in lora.values()])
            for parameter, part in zip(lora.values(), parts, strict=True):
                parameter.grad = part.view_as(parameter)
            optimizer.step()
            problem.load(lora)
            versions.append(Sampler(network=problem.network).lora())
            self.reward_by_update.append(rewards.mean().item())
        return versions

    def _at(self, lora: Lora) -> Sampler:
        """Returns the policy with a LoRA, which the network keeps."""
        self.problem.load(lora)
        return Sampler(network=self.problem.replica())

    def sampler(self, mismatch: str) -> Sampler:
        """Makes the sampler that takes the policy's place under a mismatch, given by its name.

        `int4x3` has three times the rounding error of int4 in its weights, and no other error;
        `exact` is the policy itself.
        """
        if mismatch == "exact":
            return self.policy
        if mismatch.startswith("stale"):
            return self._at(self.versions[-1 - int(mismatch.removeprefix("stale_"))])
        self.problem.load(self.versions[-1])
        if mismatch == "guidance":
            return Sampler(network=self.problem.replica(), guidance=1.01 * GUIDANCE)
        if mismatch == "rounding":
            return Sampler(network=self.problem.replica(), rounds=True)
        kind, _, factor = mismatch.partition("x")
        quantization = None if kind == "bf16" else kind
        dtype = torch.float32 if factor else torch.bfloat16
        replica = self.problem.replica(dtype=dtype, quantization=quantization)
        if factor:
            return Sampler(network=self._stretched(replica, float(factor)))
        return Sampler(network=replica)

    def _stretched(self, replica: torch.nn.Module, factor: float) -> torch.nn.Module:
        """Returns the policy's network with a multiple of the error of a replica's weights."""
        network = plain(replica, self.policy.network)
        own = dict(self.policy.network.named_parameters())
        with torch.no_grad():
            for name, weight in network.named_parameters():
                weight.copy_(torch.lerp(own[name], weight, factor))
        return network

    def truth(self, policy: Sampler, count: int) -> Gradients:
        """Computes the gradients of a policy on `count` batches of its own."""
        collector = Collector(policy, estimands())
        for index in range(count):
            batch, rewards = self.problem.rollout(policy, index, "study")
            found = evaluate(policy, batch)
            collector.add(batch, rewards, index, found, found)
        return collector.gradients()

    def calibration_pairs(self, sampler: Sampler) -> list[Pair]:
        """Samples batches that the study does not use, each with the policy on it."""
        batches = [
            self.problem.rollout(sampler, index, "calibration")[0] for index in range(CALIBRATION)
        ]
        return [(batch, evaluate(self.policy, batch)) for batch in batches]

    def gradients(self, sampler: Sampler, given: Mapping[str, Estimator], count: int) -> Gradients:
        """Computes the gradients of every estimator on the same batches, before any update."""
        collector = Collector(self.policy, given)
        for index in range(count):
            batch, rewards = self.problem.rollout(sampler, index, "study")
            found = evaluate(self.policy, batch)
            collector.add(batch, rewards, index, found, found)
        return collector.gradients()

    def gradients_of_both(
        self, sampler: Sampler, given: Mapping[str, Estimator], count: int
    ) -> tuple[Gradients, Gradients, Gradients]:
        """Computes gradients before the update and after it, and those of the rollout's policy.

        Args:
          sampler: samples the batches.
          given: the estimators by name.
          count: number of batches.

        Returns:
          The estimators' gradients before the update, those after it, and the rollout's own.
        """
        before = Collector(self.policy, given)
        after = Collector(self.moved, given)
        rollout = self.as_policy(sampler)
        own = Collector(rollout, estimands(centered=True))
        for index in range(count):
            batch, rewards = self.problem.rollout(sampler, index, "study")
            old = evaluate(self.policy, batch)
            before.add(batch, rewards, index, old, old)
            after.add(batch, rewards, index, old, evaluate(self.moved, batch, old.means))
            found = evaluate(rollout, batch)
            own.add(batch, rewards, index, found, found)
        return before.gradients(), after.gradients(), own.gradients()

    def as_policy(self, sampler: Sampler) -> Sampler:
        """Returns a sampler as a policy whose gradient can be taken."""
        network = plain(sampler.network, self.policy.network)
        return Sampler(network=network, guidance=sampler.guidance)


def _mean(values: Sequence[Any]) -> Any:
    return torch.tensor(values, dtype=torch.float64).mean(0).tolist()
