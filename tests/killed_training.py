"""A training that is killed at its fifth step, for good, as a machine that goes down does it."""

import os
import signal
import sys
from pathlib import Path

from transformers import TrainerCallback

from test_train_trainer import LONGER, build, follow


class Killer(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    trainer = build(Path(sys.argv[1]), **LONGER)
    follow(trainer, every=2)
    trainer.add_callback(Killer())
    trainer.train()


if __name__ == "__main__":
    main()
