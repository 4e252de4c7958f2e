"""From the values of many records to the tensors of one batch: stacking, padding, ragged columns."""
