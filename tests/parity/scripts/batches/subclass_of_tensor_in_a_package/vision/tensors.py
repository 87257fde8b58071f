import torch


class Image(torch.Tensor):
    @property
    def height(self):
        return self.shape[-2]
