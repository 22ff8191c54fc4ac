"""Operations that appear in the graphs of ``torch.compile``, one file each."""
