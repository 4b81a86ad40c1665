"""Train with FSDP2, checkpoint with zarrckpt, kill the training, resume it on fewer processes.

The whole demonstration (add --s3, --tp 2 or --async):
    python examples/train_fsdp2.py
Only train, with checkpoints; then resume from the latest one, on fewer processes:
    torchrun --nproc-per-node 4 examples/train_fsdp2.py --worker --checkpoints /tmp/run
    torchrun --nproc-per-node 2 examples/train_fsdp2.py --worker --checkpoints /tmp/run --resume --steps 40

training.py is the part to copy from. demo.py starts it here, kills it and compares.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps to train (%(default)s)")
    parser.add_argument("--every", type=int, default=5, help="steps from checkpoint to checkpoint (%(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (%(default)s)")
    parser.add_argument("--async", action="store_true", dest="background", help="save in the background")
    demo = parser.add_argument_group("demonstration")
    demo.add_argument("--s3", action="store_true", help="save to s3://, on a moto server started for this")
    demo.add_argument("--dir", help="keep checkpoints and logs in this new folder (default: a temporary one)")
    demo.add_argument("--kill-at", type=int, help="kill the training after this step (default: 2.5 times --every)")
    demo.add_argument("--processes", type=int, default=4, help="processes to train on (%(default)s)")
    demo.add_argument("--resume-on", type=int, default=2, help="processes to resume on (%(default)s)")
    demo.add_argument("--resume-tp", type=int, default=1, help="--tp of the resumed run (%(default)s)")
    demo.add_argument("--json", help="write the findings to this file, too")
    size = parser.add_argument_group("model and batch")
    size.add_argument("--width", type=int, default=128, help="a multiple of 32 (%(default)s)")
    size.add_argument("--layers", type=int, default=2, help="(%(default)s)")
    size.add_argument("--length", type=int, default=128, help="bytes of a sequence (%(default)s)")
    size.add_argument("--batch", type=int, default=16, help="sequences of a step, over all ranks (%(default)s)")
    size.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (%(default)s)")
    worker = parser.add_argument_group("training alone")
    worker.add_argument("--worker", action="store_true", help="only train, as one of torchrun's processes")
    worker.add_argument("--checkpoints", metavar="URL", help="folder of the checkpoints, URL/step-0005 and so on")
    worker.add_argument("--resume", action="store_true", help="resume from the latest checkpoint, if there is one")
    worker.add_argument("--seed", type=int, default=0, help="for the first weights and batches (%(default)s)")
    worker.add_argument("--records", help="append JSON records of the training to this file")
    args = parser.parse_args()
    check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a clear message if options conflict."""
    if args.width % 32:
        parser.error(f"--width {args.width} is not a multiple of 32")
    if args.worker:
        if not args.checkpoints and (args.every or args.resume):
            parser.error("--worker needs --checkpoints URL, or --every 0 for no checkpoints")
        return
    if args.kill_at is None:
        args.kill_at = args.every * 5 // 2
    if not args.every < args.kill_at < args.steps:
        parser.error(f"--kill-at {args.kill_at} must lie after the first checkpoint and before the last step")
    for processes, tp in ((args.processes, args.tp), (args.resume_on, args.resume_tp)):
        if processes % tp or args.batch % (processes // tp):
            parser.error(f"{processes} processes with tp {tp}: can't split a batch of {args.batch} evenly over them")


def main() -> int:
    args = arguments()
    if args.worker:
        from training import train

        train(args)
        sys.stdout.flush()
        # Skips Python's shutdown: a thread of gloo may still hold the tensor of the last all-reduce, and the process
        # aborts if the thread releases it during the shutdown (torch 2.13). All saves are committed by now.
        os._exit(0)
    missing = [name for name in ("zarrckpt", "torch", "xarray") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not installed: pip install 'zarrckpt[demo]', or in a clone: make demo")
    from demo import demonstrate

    return demonstrate(args)


if __name__ == "__main__":
    sys.exit(main())
