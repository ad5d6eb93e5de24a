"""Opens the folder of a run: everything in it is of the step from which the run goes on."""

from dataclasses import asdict
from pathlib import Path

from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.records.checkpoint import Checkpoint, set_aside_after
from flowgrpo_rc.records.inputs import write_inputs
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.run_folder import RunFolder, flat_settings
from flowgrpo_rc.spec.check_inputs import inputs_of
from flowgrpo_rc.spec.checks import RunInputs
from flowgrpo_rc.spec.run_spec import RunSpec
from flowgrpo_rc.spec.tell import tell


def check_one_folder(processes: Processes, resumed: Checkpoint | None) -> None:
    """Raises ValueError if the processes see different checkpoints."""
    steps = processes.gather_objects([0 if resumed is None else resumed.step])
    if len(set(steps)) > 1:
        raise ValueError(
            "trainer.output_dir must be a folder that all processes share: they see different "
            "checkpoints"
        )


def check_same_rewards(spec: RunSpec, processes: Processes) -> None:
    """Raises ValueError if machines decide differently what the rewards leave open."""
    before = flat_settings(spec.given.reward.terms, "reward.terms")
    terms = flat_settings(spec.config.reward.terms, "reward.terms").items()
    settled = [f"{key}={value}" for key, value in terms if before.get(key) != value]
    everywhere = set(processes.gather_objects([", ".join(settled)]))
    if len(everywhere) > 1:
        listed = " or ".join(sorted(everywhere))
        raise ValueError(f"the machines of this run would score with {listed}: give one of them")


def prepare_folder(
    spec: RunSpec, folder: RunFolder, processes: Processes, inputs: RunInputs
) -> list[str]:
    """Makes the folder ready for the next step; returns what a user should know of it."""
    config = spec.config
    folder.sweep()
    resumed = inputs.resumed
    step = -1 if resumed is None else resumed.step
    if resumed is not None:
        folder.check_same_inputs(inputs.read)
    suites = {
        suite.name: suite.protocol(config.rollout, text=spec.is_text).told()
        for suite in inputs.prompts.suites
    }
    facts = tell(spec, inputs.first_prompt)
    folder.create(asdict(config), processes.device, processes.count, inputs.read, facts, suites)
    rows = MetricsFile(folder.metrics)
    redone = [row["step"] for row in rows.rows() if row["step"] > max(step, 0)]
    for file in (rows, MetricsFile(folder.rejected), MetricsFile(folder.health)):
        file.truncate_after(step)
    folder.drop_rollouts_after(step)
    messages = [
        f"a damaged checkpoint was passed over and is kept as {path}; steps after {step} are "
        "trained again"
        for path in set_aside_after(folder.checkpoints, step)
    ]
    if redone:
        messages.append(f"steps from {redone[0]} on have no checkpoint: they are trained again")
    missing = rows.missing(step)
    if missing:
        messages.append(
            f"{folder.metrics} lacks the rows of {len(missing)} steps, from {missing[0]}"
        )
    health = MetricsFile(folder.health)
    earlier = [row.get("message") for row in health.rows()]
    for message in messages:
        if message not in earlier:
            health.append(step, {"message": message})
    return messages


def note_fetched(spec: RunSpec, folder: RunFolder, processes: Processes, inputs: RunInputs) -> None:
    """Compares and writes down what of the model was fetched from the hub while it was loaded."""
    config = spec.config
    if Path(config.model.path).expanduser().is_dir():
        return  # read before
    read = inputs_of(spec, inputs.prompts)
    if inputs.resumed is not None:
        folder.check_same_inputs(read)
    processes.wait()
    if processes.is_main and read.keys() != inputs.read.keys():
        write_inputs(folder.inputs, read)
