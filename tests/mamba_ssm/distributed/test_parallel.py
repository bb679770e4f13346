"""Two gloo processes against one: collectives, layers and embeddings, outputs and gradients in float64."""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from mamba_ssm.distributed.distributed_utils import (
    all_gather,
    all_gather_raw,
    all_reduce,
    allreduce_sequence_parallel_grad,
    copy_to_group,
    get_dim_for_local_rank,
    reduce_scatter,
    sync_shared_params,
)
from mamba_ssm.distributed.launch import run_group
from mamba_ssm.distributed.sharding import shard_state_dict
from mamba_ssm.distributed.tensor_parallel import ParallelEmbeddings, VocabParallelEmbedding
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mha import MHA
from mamba_ssm.modules.mlp import GatedMLP
from mamba_ssm.testing import assert_close

WORLD = 2
WHOLE = {
    "mamba2": lambda **kw: Mamba2(8, d_state=4, headdim=4, ngroups=2, chunk_size=4, bias=True, **kw),
    "mamba2-mlp": lambda **kw: Mamba2(8, d_state=4, headdim=2, ngroups=2, d_ssm=8, D_has_hdim=True, **kw),
    "mha": lambda **kw: MHA(8, 4, num_heads_kv=2, causal=True, rotary_emb_dim=2, d_conv=3, mlp_dim=16, **kw),
    "mlp": lambda **kw: GatedMLP(8, 16, multiple_of=4, bias=True, **kw),
}


def layer_equals_its_parts(group, name, sequence_parallel):
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    whole = WHOLE[name]().double()
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(3, 4, 8, dtype=torch.float64)
    want = whole(x)
    want.backward(dout)

    part = WHOLE[name](process_group=group, sequence_parallel=sequence_parallel).double()
    part.load_state_dict(shard_state_dict(whole, rank, WORLD))
    mine = slice(6 * rank, 6 * (rank + 1))                                   # rows of B·L = 12
    if sequence_parallel:
        rows = x.detach().flatten(0, 1)[mine].requires_grad_()
        out = part(rows) if name == "mlp" else part(rows, seqlen=4)
        out.backward(dout.flatten(0, 1)[mine])
        want, wanted_dx = want.flatten(0, 1)[mine], x.grad.flatten(0, 1)[mine]
    else:
        rows = x.detach().clone().requires_grad_()
        out = part(rows)
        out.backward(dout)
        wanted_dx = x.grad
    assert_close(out, want, 1e-12, f"{name} on rank {rank}")
    assert_close(rows.grad, wanted_dx, 1e-12, f"{name} dx on rank {rank}")

    for parameter in whole.parameters():
        parameter.data = parameter.grad                                      # shard gradients as weights are sharded
    for parameter_name, wanted in shard_state_dict(whole, rank, WORLD).items():
        got = part.get_parameter(parameter_name).grad
        assert_close(got, wanted, 1e-12, f"{name} gradient of {parameter_name} on rank {rank}")


def collectives_have_the_right_gradients(group):
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    inputs, dout = torch.randn(WORLD, 4, 3, dtype=torch.float64), torch.randn(WORLD, 8, 3, dtype=torch.float64)
    mine = inputs[rank].clone().requires_grad_()

    all_gather(mine, group).backward(dout[rank])
    assert_close(all_gather_raw(mine.detach(), group), inputs.flatten(0, 1), 0.0)
    assert_close(mine.grad, dout.sum(0)[4 * rank : 4 * rank + 4], 1e-15)

    mine.grad = None
    out = reduce_scatter(mine, group)
    assert_close(out, inputs.sum(0)[2 * rank : 2 * rank + 2], 1e-15)
    out.backward(dout[rank, :2])
    assert_close(mine.grad, dout[:, :2].flatten(0, 1), 0.0)

    mine.grad = None
    out = all_reduce(mine, group)
    assert_close(out, inputs.sum(0), 1e-15)
    out.backward(dout[0, :4])
    assert_close(mine.grad, dout[0, :4], 0.0)

    mine.grad = None
    copy_to_group(mine, group).backward(dout[rank, :4])
    assert_close(mine.grad, dout[:, :4].sum(0), 1e-15)

    with pytest.raises(ValueError, match=r"rows has shape \(3, 2\), expected a multiple of 2"):
        reduce_scatter(torch.zeros(3, 2), group)


def replicated_parameters_stay_alike(group):
    rank = dist.get_rank(group)
    norm = torch.nn.LayerNorm(3).double()
    norm.weight.data.fill_(float(rank + 1))
    norm.bias.data.fill_(float(rank + 1))
    norm.weight._shared_params = norm.weight._sequence_parallel = True
    sync_shared_params(norm, group)
    assert norm.weight.tolist() == [1.0] * 3
    assert norm.bias.tolist() == [rank + 1.0] * 3
    norm(torch.randn(2, 3, dtype=torch.float64)).square().sum().backward()
    before = [all_gather_raw(p.grad.clone(), group).view(WORLD, 3) for p in (norm.weight, norm.bias)]
    allreduce_sequence_parallel_grad(norm, group)
    assert_close(norm.weight.grad, before[0].sum(0), 1e-15)
    assert_close(norm.bias.grad, before[1][rank], 0.0)


def embeddings_equal_whole_ones(group):
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    words = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    positions = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    ids, dout = torch.randint(0, 10, (2, 4)), torch.randn(2, 4, 6, dtype=torch.float64)
    want = words[ids] + positions
    want.backward(dout)
    for sequence_parallel in (False, True):
        part = ParallelEmbeddings(6, 10, 4, group, sequence_parallel=sequence_parallel).double()
        part.word_embeddings.weight.data.copy_(words[5 * rank : 5 * rank + 5])
        part.position_embeddings.weight.data.copy_(positions[:, 3 * rank : 3 * rank + 3])
        out, mine = part(ids), slice(4 * rank, 4 * rank + 4)
        assert_close(out, want.flatten(0, 1)[mine] if sequence_parallel else want, 1e-15)
        out.backward(dout.flatten(0, 1)[mine] if sequence_parallel else dout)
        assert_close(part.word_embeddings.weight.grad, words.grad[5 * rank : 5 * rank + 5], 1e-15)
        assert_close(part.position_embeddings.weight.grad, positions.grad[:, 3 * rank : 3 * rank + 3], 1e-15)
    with pytest.raises(ValueError, match="num_embeddings is 9, not a multiple of 2"):
        VocabParallelEmbedding(9, 4, group)
    with pytest.raises(ValueError, match=r"ngroups is 1 and .* expected multiples of 2 ranks"):
        Mamba2(8, headdim=4, process_group=group)
    with pytest.raises(ValueError, match=r"num_heads_kv is 1 .* expected multiples of 2 ranks"):
        MHA(8, 4, num_heads_kv=1, process_group=group)


def everything(group):
    collectives_have_the_right_gradients(group)
    replicated_parameters_stay_alike(group)
    embeddings_equal_whole_ones(group)
    for name in WHOLE:
        layer_equals_its_parts(group, name, sequence_parallel=False)
        layer_equals_its_parts(group, name, sequence_parallel=True)


def everything_on_gpus(group):
    torch.set_default_device("cuda")
    everything(group)


def two_gpus(test):
    needed = pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two CUDA devices")
    return pytest.mark.gpu(needed(test))


@two_gpus
def test_two_gpus_equal_one():
    run_group(everything_on_gpus, WORLD, backend="nccl")


def test_two_processes_equal_one():
    """In one group, for starting processes costs more than all the checks; the traceback names the check."""
    run_group(everything, WORLD)


def one_rank_fails(group):
    if dist.get_rank(group) == 1:
        raise RuntimeError("rank one has had enough")
    all_reduce(torch.ones(1), group)                                         # would wait for the other for ever


def one_gpu_fails(group):
    torch.set_default_device("cuda")
    assert all_reduce(torch.ones(1), group).item() == WORLD                  # the GPUs are connected
    one_rank_fails(group)
    torch.cuda.synchronize()


@two_gpus
@pytest.mark.timeout(60)
def test_a_failing_gpu_ends_the_group_with_its_error():
    """The other GPU is inside a collective by then, which only ends with its process."""
    with pytest.raises(ProcessRaisedException, match="rank one has had enough"):
        run_group(one_gpu_fails, WORLD, backend="nccl", timeout_s=300.0)


@pytest.mark.timeout(40)
def test_a_failing_rank_ends_the_group_with_its_error():
    with pytest.raises(ProcessRaisedException, match="rank one has had enough"):
        run_group(one_rank_fails, WORLD, timeout_s=30.0)


def test_without_a_process_group_embeddings_are_plain():
    torch.manual_seed(0)
    part = ParallelEmbeddings(6, 10, 4, None, sequence_parallel=False)
    ids = torch.randint(0, 10, (2, 4))
    assert_close(part(ids), part.word_embeddings.weight[ids] + part.position_embeddings.weight, 1e-7)
    assert part(ids, combine_batch_seqlen_dim=True).shape == (8, 6)


def test_shares_of_an_axis():
    assert [get_dim_for_local_rank(10, 4, rank, 2) for rank in range(4)] == [4, 2, 2, 2]
    with pytest.raises(ValueError, match="dim is 9, expected a multiple of multiple_of = 2"):
        get_dim_for_local_rank(9, 2, 0, 2)


def test_layers_that_cannot_be_sharded_are_refused():
    with pytest.raises(TypeError, match="layer is a Linear, expected Mamba2, MHA or GatedMLP"):
        shard_state_dict(torch.nn.Linear(2, 2), 0, 2)
    with pytest.raises(ValueError, match=r"fc1\.weight has a part of width 4, expected a multiple of 3"):
        shard_state_dict(GatedMLP(4, 4, multiple_of=4), 0, 3)
