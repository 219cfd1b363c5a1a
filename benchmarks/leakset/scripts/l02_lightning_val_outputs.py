"""A LightningModule moved from 1.x to 2.x: the outputs are collected by hand, and never cleared."""
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
        self.validation_step_outputs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.validation_step_outputs.append({"val_loss": loss, "logits": logits, "target": y})
        return loss

    def on_validation_epoch_end(self):
        mean = torch.stack([o["val_loss"] for o in self.validation_step_outputs]).mean()
        self.log("val_loss", mean)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


train = TensorDataset(torch.randn(6400, 128), torch.randint(0, 500, (6400,)))
val = TensorDataset(torch.randn(320, 128), torch.randint(0, 500, (320,)))
trainer = pl.Trainer(max_steps=args.steps, accelerator="cpu", val_check_interval=20, check_val_every_n_epoch=None,
                     logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), DataLoader(train, 64, shuffle=True), DataLoader(val, 64))
print("done", trainer.global_step)
# mypy: ignore-errors
