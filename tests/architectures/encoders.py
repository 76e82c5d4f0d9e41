"""Text encoders."""

from __future__ import annotations

from typing import Any

from tests.architectures.table import VOCABULARY, Architecture, labelled, text

_BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
# In RoBERTa token 1 is padding, and positions start after this number.
_ROBERTA = {**_BERT, "pad_token_id": 1}


def _encoder(name: str, head: str = "Model", **settings: Any) -> Architecture:
    inputs = labelled if head in ("ForMaskedLM", "ForTokenClassification") else text
    return Architecture("encoder", name + head, f"{name}Config", {**_BERT, **settings}, inputs)


TABLE = {
    "bert": _encoder("Bert"),
    "bert-mlm": _encoder("Bert", "ForMaskedLM"),
    "roberta": _encoder("Roberta", "ForMaskedLM", **_ROBERTA),
    "xlm-roberta": _encoder("XLMRoberta", **_ROBERTA),
    "distilbert": Architecture(
        "encoder",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 1,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 40,
        },
        labelled,
    ),
    "albert": _encoder("Albert", "ForMaskedLM", embedding_size=16, hidden_dropout_prob=0.1),
    "electra": _encoder("Electra", embedding_size=16),
    "deberta": _encoder(
        "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=8
    ),
    "deberta-v2": _encoder(
        "DebertaV2",
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    "mpnet": _encoder("MPNet", **_ROBERTA),
    "convbert": _encoder("ConvBert", embedding_size=32, conv_kernel_size=3),
    "fnet": Architecture(
        "encoder",
        "FNetModel",
        "FNetConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "intermediate_size": 64,
            "max_position_embeddings": 40,
        },
        lambda: {"input_ids": text()["input_ids"]},
    ),
    "funnel": Architecture(
        "encoder",
        "FunnelModel",
        "FunnelConfig",
        {
            "vocab_size": VOCABULARY,
            "block_sizes": [1, 1],
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 64,
            "num_decoder_layers": 1,
        },
        text,
        # Before 5.23 forward read the ends of positions from tensors.
        refused="torch.export cannot capture",
        refused_before="5.23",
    ),
    "modernbert": _encoder(
        "ModernBert",
        "ForMaskedLM",
        num_hidden_layers=2,
        global_attn_every_n_layers=2,
        local_attention=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        embedding_dropout=0.1,
        attention_dropout=0.1,
    ),
    "nystromformer": _encoder("Nystromformer", num_landmarks=10, segment_means_seq_len=10),
    "squeezebert": _encoder("SqueezeBert", embedding_size=32),
    "camembert": _encoder("Camembert", "ForTokenClassification", **_ROBERTA, num_labels=VOCABULARY),
    "ernie": _encoder("Ernie", use_task_id=True, task_type_vocab_size=3),
    "rembert": _encoder("RemBert", input_embedding_size=16, output_embedding_size=32),
    "layoutlm": _encoder("LayoutLM", max_2d_position_embeddings=64),
    "roformer": _encoder("RoFormer", embedding_size=32),
    "mobilebert": _encoder(
        "MobileBert",
        embedding_size=16,
        intra_bottleneck_size=16,
        true_hidden_size=16,
        intermediate_size=32,
    ),
}
