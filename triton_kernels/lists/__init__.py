"""The ops on lists of tensors, and update_scale_."""
