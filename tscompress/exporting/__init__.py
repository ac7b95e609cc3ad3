"""Models as ONNX graphs: written from torch, in four precisions, and checked against it."""
