"""The comparisons of scripts/compare_commits.py.

bits       trained weights and metrics of two commits
plans      plans of two commits
files      files that the old commit wrote, read by the new one
speed      seconds of two commits
checkout   a commit in a git worktree, and programs that run from there
equality   differences between metrics, tensors and plans; no processes, no files of a run
_layouts   program: runs layouts one after another under torchrun
_planning  program: plans one script after another
"""
