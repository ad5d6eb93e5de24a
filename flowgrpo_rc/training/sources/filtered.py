"""Groups that teach nothing are dropped, and further prompts are sampled in their places."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch, PromptBatch, Rewards
from flowgrpo_rc.core.advantages import group_relative
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.records.samples import Shown
from flowgrpo_rc.rewards.collect import collect_rewards
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.training.config import AlgorithmConfig
from flowgrpo_rc.training.sources.engine import EngineSource
from flowgrpo_rc.training.sources.source import Collected

logger = logging.getLogger(__name__)


class _Scored(NamedTuple):
    """Samples of this process with their rewards, group by group."""

    batch: Batch
    rewards: Rewards
    shown: Shown

    def select(self, rows: Tensor) -> "_Scored":
        index = rows.cpu()
        shown = self.shown.select(index.tolist())
        return _Scored(self.batch.select(index), self.rewards.select(index), shown)


@dataclass(eq=False)
class FilteredSource(EngineSource):
    """Samples again, with the prompts that come next, in the slots whose groups are dropped.

    A slot belongs to one process, and its prompt and noise follow from the global batch. So groups
    stay spread evenly, and the number of processes changes no sample. A group that is missing after
    the last refill stays as it is.
    """

    algorithm: AlgorithmConfig

    def collect(self, step: int) -> Collected:
        """Samples until all groups of all processes teach, or as often as is allowed."""
        collected = super().collect(step)
        scored = _Scored(collected.batch, collected.rewards(), collected.shown)
        drawn = [scored.rewards]
        counts: Counter[str] = Counter(dropped_equal=0, dropped_failed=0, refills=0)
        # What is missing is the same on all processes, and so is all that follows from it.
        while missing := self.processes.gather_objects(self._missing(scored)):
            if counts["refills"] + 1 == self.algorithm.filter_groups.max_num_gen_batches:
                break
            counts.update(["refills", *(f"dropped_{fault}" for _, fault in missing)])
            slots = sorted(slot for slot, _ in missing)
            prompts = self.sampler.further(step - 1, len(slots))
            further = PromptBatch(step=step, prompts=prompts, slots=slots)
            scored = self._refilled(scored, further, counts["refills"], drawn)
        counts["unfilled"] = len(missing)
        metrics = collected.metrics or MetricBag()
        for name, count in counts.items():
            metrics.max(f"groups/{name}", torch.tensor(float(count)))
        for rewards in drawn:
            metrics.mean("groups/drawn_reward", rewards.total, rewards.valid)
        teaches = self.processes.any(not bool(self._equal(scored).all()))
        if not teaches:
            logger.warning("step %d: no update, since the rewards of all groups are equal", step)
        batch, rewards, shown = scored
        return Collected(batch, lambda: rewards, shown, metrics, teaches=teaches)

    def state(self) -> dict[str, object]:
        """Returns how many prompts were drawn beyond those of the steps."""
        return {"further_prompts": self.sampler.num_further}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on behind the prompts that were drawn."""
        self.sampler.num_further = state["further_prompts"]

    def _equal(self, scored: _Scored) -> Tensor:
        """Returns the groups [G] bool, by slot, whose rewards are all equal, as estimators see."""
        group = scored.batch.group.cpu()
        rewards = scored.rewards
        columns = [rewards.total]
        if self.algorithm.adv_estimator == "gdpo":
            columns = [rewards.parts[name] for name in self.rewards.weights]
        equal = [group_relative(column, group, rewards.valid).zero_std for column in columns]
        return torch.stack(equal).all(0)

    def _missing(self, scored: _Scored) -> list[tuple[int, str]]:
        """Returns the slots of this process's groups that are dropped, and why."""
        group = scored.batch.group.cpu()
        equal = group.unique()[self._equal(scored)].tolist()
        failed = group[~scored.rewards.valid].tolist()
        return [*(dict.fromkeys(equal, "equal") | dict.fromkeys(failed, "failed")).items()]

    def _refilled(
        self, scored: _Scored, further: PromptBatch, refill: int, drawn: list[Rewards]
    ) -> _Scored:
        """Returns this process's samples, with new ones in those slots that `further` names."""
        group = scored.batch.group
        slots = set(group.tolist())
        pairs = zip(further.slots, further.prompts, strict=True)
        prompt_of = {slot: prompt for slot, prompt in pairs if slot in slots}
        if not prompt_of:  # the others count what failed, which takes all processes
            collect_rewards(self.rewards, [], self.processes, grouped=True, earlier=drawn)
            return scored
        of_process = replace(further, prompts=[*prompt_of.values()], slots=[*prompt_of])
        collected = self.sample(of_process, refill)
        drawn.append(collected.rewards(earlier=drawn))
        stays = ~torch.isin(group, collected.batch.group)
        both = [_Scored(collected.batch, drawn[-1], collected.shown)]
        both += [scored.select(stays.nonzero().squeeze(1))] if stays.any() else []
        batches, rewards, shown = zip(*both, strict=True)
        joined = _Scored(concat(batches), Rewards.join(rewards), Shown.join(shown))
        return joined.select(joined.batch.group.argsort(stable=True))
