"""What every process shares: errors, frames, layout, protocol machines. Standard library only."""
