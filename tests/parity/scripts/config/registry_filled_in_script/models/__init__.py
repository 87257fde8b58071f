from .data import Numbers
from .registry import REGISTRY
