import torch

from dataloaderjob import DataLoader

if __name__ == "__main__":
    squares = [torch.tensor(i * i) for i in range(8)]
    for batch in DataLoader(squares, batch_size=4, num_workers=2):
        print(batch)
