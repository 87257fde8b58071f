"""Lightning's Trainer."""

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from task import BATCH, EPOCHS, SAVE_EVERY, WORKERS, Seen, count_step, dataset, folder, loss_of, model, report

from dataloaderjob import DataLoader


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = model(), Seen()

    def training_step(self, batch, _):
        self.seen.add(batch)
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"], checkpoint["rng"] = self.seen.state_dict(), torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint):
        self.seen.load_state_dict(checkpoint["seen"])
        self.rng = checkpoint["rng"]

    def on_train_start(self):
        if hasattr(self, "rng"):
            torch.set_rng_state(self.rng)


class Stop(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):  # noqa: ARG002  signature of the base class
        count_step()


def main() -> None:
    path = folder()
    lightning.seed_everything(0, verbose=False)
    module = Model()
    saves = ModelCheckpoint(
        path,
        filename="last",
        every_n_train_steps=SAVE_EVERY,
        save_top_k=1,
        monitor=None,
        enable_version_counter=False,
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saves, Stop()],
    )
    loader = DataLoader(dataset(), BATCH, shuffle=True, num_workers=WORKERS)
    last = path / "last.ckpt"
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None, weights_only=False)
    report(module.net, module.seen)


if __name__ == "__main__":
    main()
