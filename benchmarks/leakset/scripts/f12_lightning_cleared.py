"""A LightningModule that collects its validation outputs and clears them at the end of each validation."""
import argparse
import logging
import warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning.pytorch as pl

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=400)
args = ap.parse_args()
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 500))
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.outputs.append((self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        logits, y = (torch.cat(t) for t in zip(*self.outputs))
        self.log("val_acc", (logits.argmax(1) == y).float().mean())
        self.outputs.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


train = TensorDataset(torch.randn(6400, 128), torch.randint(0, 500, (6400,)))
val = TensorDataset(torch.randn(640, 128), torch.randint(0, 500, (640,)))
trainer = pl.Trainer(max_steps=args.steps, accelerator="cpu", val_check_interval=50, check_val_every_n_epoch=None,
                     logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), DataLoader(train, 64, shuffle=True), DataLoader(val, 64))
print("done", trainer.global_step)
# mypy: ignore-errors
