"""The pages, and the commands that write their generated parts."""
