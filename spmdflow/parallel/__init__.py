"""How the ranks of a model are arranged (integers), and the process groups over them.

The ranks of a pool, in ascending order, fill a grid with tp fastest, then pp, then dp:

    rank = (dp * pp_size + pp) * tp_size + tp        (position within the pool)

so a replica, the ranks that hold one copy of the model, is a contiguous block. World 8 with
p2 t2 d2: tp [0,1][2,3][4,5][6,7], pp [0,2][1,3][4,6][5,7], dp [0,4][1,5][2,6][3,7].

Generation splits each replica again, into p_g stages of t_g ranks, with d_g = p*t / (p_g*t_g)
generation replicas inside one training replica (paper section 5):

    tp_g = tp // (t/t_g)      pp_g = pp // (p/p_g)
    micro_dp = (pp % (p/p_g)) * (t/t_g) + tp % (t/t_g)

Generation tp groups are strided and micro-dp groups are neighbours, so that each training shard
is inside its own rank's generation shard. Training 1-4-2, generation 1-2-2-2: generation tp
[0,2][1,3][4,6][5,7], micro-dp [0,1][2,3][4,5][6,7].

| file | what |
|---|---|
| layout | the integers of the grid |
| group | process groups of rank tuples |
| device | what this process computes on |
| allocator | what the environment says to torch's allocator of device memory |
| allocated | on a CPU: what this process has allocated, and the peak of it |

`layout` has the integers and needs no torch. `group` turns rank tuples into process groups, once,
while models are spawned. `device` chooses the device of this process.
"""
