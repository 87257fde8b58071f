from .defaults import cfg
