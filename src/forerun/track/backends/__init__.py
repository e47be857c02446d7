"""Trackers: TensorBoard, MLflow and custom classes."""
