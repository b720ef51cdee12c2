"""What pages show of the code: pictures of schedules, formulas, tables, the output of commands."""
