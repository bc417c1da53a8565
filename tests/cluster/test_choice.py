"""The strategy that an environment asks for, and the sentence that says why."""

import pytest

from tfdist_ext.cluster import ClusterSpecification, Surroundings, choose, find_tpu
from tfdist_ext.cluster.specification import Task


def cluster(task_type="worker", index=0, **counts):
    jobs = {
        job: [f"localhost:{2000 + 100 * number + i}" for i in range(count)]
        for number, (job, count) in enumerate(counts.items())
    }
    return ClusterSpecification.from_jobs(jobs, task=Task(task_type, index))


@pytest.mark.parametrize(
    ("surroundings", "kind", "reason"),
    [
        (
            Surroundings(tpu="local", tpu_source="TPU_NAME", num_gpus=2, cluster=cluster(worker=2)),
            "tpu",
            "TPUStrategy on the TPU 'local': TPU_NAME says that there is one.",
        ),
        (
            Surroundings(cluster=cluster("ps", chief=1, worker=2, ps=1), num_gpus=2),
            "parameter_servers",
            "ParameterServerStrategy as ps:0: TF_CONFIG has a ps job (1 chief, 2 worker, 1 ps).",
        ),
        (
            Surroundings(cluster=cluster(index=1, worker=2)),
            "multi_worker",
            "MultiWorkerMirroredStrategy as worker:1: TF_CONFIG has 2 tasks that train and no ps; "
            "each brings its 1 CPU.",
        ),
        (
            Surroundings(cluster=cluster(worker=2), num_gpus=4),
            "multi_worker",
            "MultiWorkerMirroredStrategy as worker:0: TF_CONFIG has 2 tasks that train and no ps; "
            "each brings its 4 GPUs.",
        ),
        (
            Surroundings(cluster=cluster("evaluator", worker=2, evaluator=1), num_gpus=2),
            "several_devices",
            "MirroredStrategy on 2 GPUs: this process sees them, and an evaluator trains with nobody.",
        ),
        (
            Surroundings(cluster=cluster(worker=1), num_gpus=1),
            "one_device",
            "MirroredStrategy on 1 GPU: this process sees no more, and TF_CONFIG names one task only.",
        ),
        (
            Surroundings(num_cpus=4),
            "several_devices",
            "MirroredStrategy on 4 logical CPUs: the program made them, and TF_CONFIG is unset.",
        ),
        (
            Surroundings(),
            "one_device",
            "MirroredStrategy on 1 CPU: no TPU and no GPU was found, and TF_CONFIG is unset.",
        ),
    ],
)
def test_the_first_that_applies_is_chosen_and_says_why(surroundings, kind, reason):
    choice = choose(surroundings)
    assert (choice.kind, str(choice)) == (kind, reason)
    assert choice.tpu == (surroundings.tpu if kind == "tpu" else None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (None, "")),
        ({"TPU_NAME": " "}, (None, "")),
        ({"TPU_NAME": "local"}, ("local", "TPU_NAME")),
        ({"COLAB_TPU_ADDR": "10.0.0.2:8470"}, ("grpc://10.0.0.2:8470", "COLAB_TPU_ADDR")),
        ({"COLAB_TPU_ADDR": "grpc://10.0.0.2:8470"}, ("grpc://10.0.0.2:8470", "COLAB_TPU_ADDR")),
        (
            {"TPU_NAME": "mine", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.1.1.1:8470"},
            ("grpc://10.1.1.1:8470", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"),
        ),
    ],
)
def test_the_environment_names_a_tpu(environ, expected, tmp_path):
    assert find_tpu(environ, pci_devices=str(tmp_path)) == expected


def test_chips_on_the_pci_bus_are_found(tmp_path):
    # Two v5e chips, a network card of the same vendor, a chip of another vendor, and a folder without files.
    for number, (vendor, device) in enumerate(
        [("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x10de", "0x0063"), (None, None)]
    ):
        folder = tmp_path / f"0000:00:0{number}.0"
        folder.mkdir()
        if vendor:
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "device").write_text(f"{device}\n")
    assert find_tpu({}, pci_devices=str(tmp_path)) == ("local", "the PCI bus, with 2 TPU chips,")
    assert find_tpu({"TPU_NAME": "mine"}, pci_devices=str(tmp_path)) == ("mine", "TPU_NAME")
    assert find_tpu({}, pci_devices=str(tmp_path / "missing")) == (None, "")
