"""The mechanism declarations and their layers; the declarations do not import torch until a layer is built."""
