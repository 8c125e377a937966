"""An optimizer whose parameters have owners. Its state is consolidated, checked, and dealt out."""
