"""What keeps processes alive and ends them: members and their restarts."""
