"""Training: TrainingArguments and Trainer, their data, losses, optimizer, callbacks and checkpoints."""
