# mypy: ignore-errors
"""Train with an average of the weights, a scheduler and metrics that are reset at each validation."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassAccuracy
from tqdm import tqdm

STEPS = 480


def validate(model, metrics):
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(256, 64)
            metrics.update(model(x).softmax(1), x[:, :5].argmax(1))
    values = {name: float(value) for name, value in metrics.compute().items()}
    metrics.reset()
    model.train()
    return values


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 700), nn.ReLU(), nn.Dropout(0.1), nn.Linear(700, 5))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)
    metrics = MetricCollection([MulticlassAUROC(5, thresholds=None), MulticlassAccuracy(5)])
    training = MulticlassAUROC(5, thresholds=None)
    history = []
    bar = tqdm(range(STEPS), disable=None)
    for step in bar:
        x = torch.randn(256, 64)
        target = x[:, :5].argmax(1)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        training.update(logits.detach().softmax(1), target)
        history.append(loss.item())
        if step % 120 == 119:
            value = float(training.compute())
            training.reset()
            bar.set_postfix(auroc=value, **validate(average.module, metrics))
    print(sum(history) / len(history))


main()
