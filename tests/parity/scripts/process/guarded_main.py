import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    x = torch.arange(16.0).view(8, 2) / 16
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, num_workers=2)
    for epoch in range(3):
        for inputs, targets in loader:
            model.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        show(round(loss.item(), 5))


if __name__ == "__main__":
    main()
