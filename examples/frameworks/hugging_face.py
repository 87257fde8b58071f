"""Hugging Face's Trainer."""

import torch
from task import BATCH, EPOCHS, SAVE_EVERY, WORKERS, Seen, count_step, dataset, folder, loss_of, model, report
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from dataloaderjob.transformers import FeedersMixin


class Model(nn.Module):
    """A model with a digest of its training batches in a buffer, because a checkpoint has parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = model(), Seen()
        self.register_buffer("digest", torch.zeros(64, dtype=torch.uint8))

    def forward(self, images, labels):
        self.seen.digest = bytes(self.digest.tolist()).strip(b"\0").decode()
        self.seen.add((images, labels))
        self.digest.copy_(torch.tensor(list(self.seen.digest.encode()), dtype=torch.uint8))
        return {"loss": loss_of(self.net, (images, labels))}


class FeederTrainer(FeedersMixin, Trainer):
    """A Trainer with feeders."""


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):  # noqa: ARG002  signature of the base class
        count_step()


def collate(samples):
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


def main() -> None:
    path = folder()
    arguments = TrainingArguments(
        output_dir=str(path), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, learning_rate=0.01,
        save_steps=SAVE_EVERY, dataloader_num_workers=WORKERS, seed=0, use_cpu=True, report_to=[], disable_tqdm=True,
        remove_unused_columns=False, logging_strategy="no",
    )  # fmt: skip
    torch.manual_seed(0)
    module = Model()
    trainer = FeederTrainer(
        module, arguments, train_dataset=dataset(), data_collator=collate, callbacks=[Stop()]
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(path))
    report(module.net, module.seen)


if __name__ == "__main__":
    main()
