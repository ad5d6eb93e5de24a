"""What each phase of a planned step needs besides, beyond what a process holds all the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.planning.activations import rows_at_once, samples_at_once
from flowgrpo_rc.planning.weights import Job, Row, as_size, memory, total, while_loading


def phases(job: Job, activations: Mapping[str, int]) -> list[Row]:
    """Returns what each phase of a step needs besides; the phases follow each other."""
    config = job.config
    gathered = _gathered(job)
    samples = samples_at_once(job.spec)
    update = activations["update"] + gathered
    formula = f"activations of {rows_at_once(job.spec)} rows"
    if gathered:
        formula += f", {as_size(gathered)} of gathered weights"
    if job.processes > 1:
        update = max(update, 4 * job.trained)
        formula += ", or a flat copy of the gradients"
    steps = [("update", update, formula)]
    idle = config.model.offload_idle
    vae = job.network_bytes["vae"] if idle else 0
    in_vae = f"the {job.vae_dtype} VAE{', and the VAE' if idle else ''}"
    if not config.rollout.workers:
        sampling = activations["rollout"]
        formula = f"activations of {samples['rollout']} samples"
        if job.sleeps:
            sampling += job.engine
            formula += ", and the engine, which sleeps otherwise"
        steps.append(("rollout", sampling, formula))
        formula = f"activations of {samples['decoding']} samples in {in_vae}"
        steps.append(("decoding", activations["decoding"] + vae, formula))
    encoders = job.others - job.network_bytes["vae"]
    if config.model.prompt_cache is not None:
        others = total(memory(job)) - job.network_bytes["vae"] + vae
        formula = f"{as_size(encoders)} of text encoders, before all but the VAE"
        steps.append(("first pass", max(0, encoders - others), formula))
    elif idle:
        steps.append(("encoding", encoders, "text encoders; their activations are small"))
    if config.trainer.val_before_train or config.trainer.test_freq >= 0:
        evaluation = max(activations["evaluation"] + gathered, activations["shown"] + vae)
        spec = config.rollout.held_out_spec()
        formula = f"activations of {samples['evaluation']} samples of {spec.height} x {spec.width}"
        formula += f", or of {samples['shown']} in {in_vae}"
        steps.append(("evaluation", evaluation, formula))
    loading = while_loading(job)
    if loading:
        formula = "at most: weights that are split or quantized only when they are on the card"
        steps.append(("loading", loading, formula))
    return steps


def at_peak(steps: Sequence[Row], activations: Mapping[str, int]) -> tuple[int, int]:
    """Returns the bytes of the largest phase, and how many of them are activations."""
    name, size, _ = max(steps, key=lambda row: row[1], default=("", 0, ""))
    if name == "evaluation":
        return size, max(activations[name], activations["shown"])
    return size, activations.get(name, 0)


def _gathered(job: Job) -> int:
    """Returns the bytes of split weights that are whole on a card during a forward or backward.

    These are a block that computes, one that is fetched meanwhile, and what is in no block.
    """
    if job.strategy != "fsdp2":
        return 0
    blocks = [
        sum(p.numel() * p.itemsize for p in module.parameters() if not p.requires_grad)
        for network in transformers(job.model.network).values()
        for module in network.modules()
        if type(module).__name__ in network._no_split_modules
    ]
    return job.transformers - sum(blocks) + 2 * max(blocks)
