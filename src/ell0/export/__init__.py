"""Models as files for other programs: ONNX, `torch.export`, and the layout of the Hugging Face hub."""

from .hub import from_pretrained, save_pretrained
from .programs import load_program, save_onnx, save_program

__all__ = ["from_pretrained", "load_program", "save_onnx", "save_pretrained", "save_program"]
