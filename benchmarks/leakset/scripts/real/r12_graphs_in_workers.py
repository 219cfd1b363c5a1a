"""A data set makes molecules as graphs of networkx, and its workers keep those that they have made."""
import time

import networkx
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS, BATCH = 360, 4


class Molecules(Dataset):
    def __init__(self):
        self.graphs = {}

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        graph = networkx.random_regular_graph(3, 24, seed=index)
        for node in graph:
            graph.nodes[node]["charge"] = node * 0.1 + index
        self.graphs[index] = graph
        return torch.from_numpy(networkx.to_numpy_array(graph)).float()


def main():
    torch.manual_seed(0)
    loader = DataLoader(Molecules(), BATCH, num_workers=2, multiprocessing_context="fork")
    model = nn.Sequential(nn.Flatten(), nn.Linear(24 * 24, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for batch in loader:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
    print("done", STEPS)


if __name__ == "__main__":
    main()
# mypy: ignore-errors
