"""Which rows travel to which rank, and how: the protocols, and the lane that moves the rows.

A protocol has three promises. `distribute` says which rows each rank gets; they are there when the
method starts. `collect` says which ranks answer, and in which order. `holds` says which ranks keep
rows of the result; the others return None. All are pure functions of a layout and a number of rows.
The controller and the planner call them, and no rank asks another.

| name | rank (pp, tp, dp) gets | who answers |
|---|---|---|
| ONE_TO_ALL | everything | all ranks, as a list |
| 3D_PROTO | chunk dp of d | pp = last, tp = 0, by dp, joined (every tp of the last stage holds) |
| 3D_ALL_MICRO_DP | chunk dp*d_g + micro_dp of d*d_g | first rank of each generation replica, joined (all its ranks hold) |
| 3D_PP_ONLY | everything | tp = 0, dp = 0, by pp, as a list |
| DP_PROTO | chunk of its rank | all ranks in order, joined |
| ALL_TO_ALL | the i-th of a given list | all ranks, as a list |
| 3D_PP_AS_DP | chunk dp*p + pp of p*d | tp = 0, by (dp, pp), joined |
| DP_METRIC | chunk of its rank | all ranks, as a list |

Files: `protocol` decides who gets what and who answers; `lane` moves the rows of a released plan.
`worker` and `register` have the old names of what `spmdflow.worker_api` has now, until 0.3.0.
"""  # noqa: E501 a table row is one line
