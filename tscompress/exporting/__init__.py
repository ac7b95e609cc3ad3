"""Models as ONNX graphs: written from torch, in three precisions, and checked against it."""
