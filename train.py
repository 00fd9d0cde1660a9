"""Train a model with the settings in YAML configs, on all GPUs of this machine or under a launcher.

Example: `python train.py a.yml b.yml -o key=value`.
"""

import os
from argparse import ArgumentParser, Namespace
from functools import partial

from megatron import entry, launcher, preemption
from megatron.config.command_line import config_parser, load_for, load_or_exit
from megatron.config.describe import describe

PLAN_OPTIONS = ("gpus", "gpu", "mfu", "price", "gpus_per_node", "network_gbps", "search")


def main() -> int:
    """Train with the configs that the command line names.

    Returns:
        The exit code: 0 on success, 2 for a config error, 1 for another error that the user can
        fix.
    """
    # If a signal ends the job early, the exit code is the config's `preemption_exit_code`.
    parser = config_parser(__doc__)
    check_help = "validate, look for what the run needs, print the result, stop"
    parser.add_argument("--check", action="store_true", help=check_help)
    fallback_help = "pass over a damaged newest checkpoint"
    parser.add_argument("--allow-fallback", action="store_true", help=fallback_help)
    parser.add_argument("-v", "--verbose", action="store_true", help="show DeepSpeed's log")
    _add_plan_arguments(parser)
    args = parser.parse_intermixed_args()
    given = [name for name in PLAN_OPTIONS if getattr(args, name) != parser.get_default(name)]
    without_plan = ([], ["gpus"]) if args.check or args.rehearse else ([],)
    if not args.plan and given not in without_plan:
        text = "--gpus needs --plan, --check or --rehearse; --gpu, --mfu and --price need --plan, "
        text += "and so do --gpus-per-node, --network-gbps and --search"
        parser.error(f"{text}; none of them starts the run")
    if args.check:
        code = _check(args)
        return _plan(args) or code if args.plan else code
    if args.plan:
        return _plan(args)
    if args.rehearse:
        return _rehearse(args)
    if launcher.is_alone():
        import torch

        gpus = torch.cuda.device_count()
        if gpus > 1:
            print(f"starting {gpus} processes, one for each visible GPU", flush=True)
            return launcher.start_ranks(gpus)
    if not launcher.is_alone():
        import megatron.engine.job.failure  # noqa: F401  an error of one rank ends the job
    config = load_or_exit(args)
    preemption.listen(config.training.preemption_exit_code, config.training.exit_duration_in_mins)
    from megatron.engine.job.error_messages import user_errors
    from megatron.pretraining.run import train

    with user_errors():
        return train(config, verbose=args.verbose, allow_fallback=args.allow_fallback)


def _add_plan_arguments(parser: ArgumentParser) -> None:
    plan = parser.add_argument_group("plan")
    plan.add_argument("--plan", action="store_true", help="memory, time and cost of a run; stop")
    rehearse = "run a step as every rank, with a small model, and check that all communicate; stop"
    plan.add_argument("--rehearse", action="store_true", help=rehearse)
    gpus = "number of GPUs; default: as for the run"
    plan.add_argument("--gpus", metavar="N", type=entry.number(int, 1), help=gpus)
    plan.add_argument("--gpu", metavar="NAME", default="H100", help="default H100")
    mfu = "the part of the GPU's peak that is reached; default: estimated from the layout"
    plan.add_argument("--mfu", metavar="X", type=float, help=mfu)
    node = "GPUs of a machine, default 8"
    plan.add_argument(
        "--gpus-per-node", metavar="N", type=entry.number(int, 1), default=8, help=node
    )
    network = "Gbit/s between machines, for a whole machine; default: by --gpu"
    plan.add_argument("--network-gbps", metavar="X", type=entry.number(float, 1.0), help=network)
    search = "list the fastest layouts that fit, even if this one fits (a minute or two)"
    plan.add_argument("--search", action="store_true", help=search)
    price = entry.number(float, 0.0)
    plan.add_argument("--price", metavar="X", type=price, help="of a GPU hour")


def _check(args: Namespace) -> int:
    """Print the config and check what the run needs. Return 1 if something is missing, else 0."""
    from megatron.pretraining.readiness import readiness

    if args.gpus:
        os.environ["WORLD_SIZE"] = str(args.gpus)  # of the processes that would be started
    config = load_or_exit(args, joins=False)
    print(describe(config))
    found = list(readiness(config))
    for problem, title in ((False, "on this machine"), (True, "not ready on this machine")):
        lines = [line for is_problem, line in found if is_problem == problem]
        if lines:
            print("\n  ".join([f"\n{title}", *lines]))
    from megatron.engine.build import positional_of, theta_of
    from megatron.engine.job.error_messages import user_errors

    with user_errors():
        theta_of(config, positional_of(config))  # refuses keys that the embedding does not have
    return int(any(is_problem for is_problem, _ in found))


def _plan(args: Namespace) -> int:
    """Print the plan of the run without starting the run or reading data, and return 0."""
    load = partial(load_for, args.gpus or launcher.world_size(), args)
    from megatron.engine.job.error_messages import user_errors
    from megatron.plan.plan_text import plan_text

    given = args.gpu, args.mfu, args.price, args.gpus_per_node, args.network_gbps, args.search
    with user_errors():
        print(plan_text(load, *given))
    return 0


def _rehearse(args: Namespace) -> int:
    """Rehearse the run with a small model on this machine's processors, and return 0."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    load = partial(load_for, args.gpus or launcher.world_size(), args)
    from megatron.engine.job.error_messages import user_errors
    from megatron.pretraining.run import train
    from megatron.rehearsal.rehearse import rehearse

    with user_errors():
        print(rehearse(load, train))
    return 0


if __name__ == "__main__":
    entry.run(main)
