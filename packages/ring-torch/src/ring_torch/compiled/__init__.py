"""What ``torch.compile`` sees of the ring: one file for each operation, and what they share."""
