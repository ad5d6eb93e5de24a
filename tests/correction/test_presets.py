"""The presets of the documents and of verl 0.6.1 and 0.9.1 have the settings written down there."""

import pytest

from flowgrpo_rc import RolloutCorrectionConfig as Config
from flowgrpo_rc.correction.presets import PRESETS

BYPASS = {"bypass_mode": True}
REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}
VETO = {"rollout_token_veto_threshold": 1e-4}


def token(threshold=2.0):
    return {"rollout_is": "token", "rollout_is_threshold": threshold}


def sequence(threshold=2.0):
    return {"rollout_is": "sequence", "rollout_is_threshold": threshold}


def rejects(criterion, threshold, lower=None):
    return {
        "rollout_rs": criterion,
        "rollout_rs_threshold": threshold,
        "rollout_rs_threshold_lower": lower,
    }


GEO = rejects("seq_mean_k1", "0.999_1.001")
K3 = rejects("seq_mean_k3", 0.01)
SUM = rejects("seq_sum_k1", "0.5_2.0")
MIS = {**token("0.5_2.0"), "rollout_is_mode": "mask"}

# The documents know no centered log-ratio.
PLAIN = vars(Config()) | {"centered": False}
# Only what differs from the defaults, which change nothing.
EXPECTED = {
    "disabled": {},
    "decoupled_token_is": token(),
    "decoupled_seq_is": sequence(),
    "decoupled_token_icepop": token("0.5_5.0"),
    "decoupled_seq_is_rs": sequence() | SUM,
    "decoupled_geo_rs": GEO | VETO,
    "decoupled_geo_rs_seq_tis": sequence() | GEO,
    "decoupled_geo_rs_token_tis": token() | GEO,
    "decoupled_k3_rs": K3,
    "decoupled_k3_rs_seq_tis": sequence() | K3,
    "decoupled_k3_rs_token_tis": token() | K3,
    "bypass_ppo_clip": BYPASS,
    "bypass_ppo_clip_geo_rs": BYPASS | GEO,
    "bypass_ppo_clip_k3_rs": BYPASS | K3,
    "bypass_pg_is": REINFORCE | sequence(),
    "bypass_pg_token_icepop": REINFORCE | token("0.5_5.0"),
    "bypass_pg_geo_rs": REINFORCE | GEO,
    "bypass_pg_geo_rs_seq_tis": REINFORCE | sequence() | GEO,
    "bypass_pg_geo_rs_token_tis": REINFORCE | token() | GEO,
    # The older spelling.
    "token_is": token(),
    "seq_is": sequence(),
    "seq_is_rs": sequence() | SUM,
    "seq_mis": sequence() | rejects("seq_sum_k1", 2.0, 0.0),
    "geo_rs": GEO | VETO,
    "ppo_is_bypass": BYPASS | token(),
    "pg_is": REINFORCE | sequence(),
    "pure_is": REINFORCE | sequence(),
    "pg_rs": REINFORCE | GEO | VETO,
    # slime
    "slime_tis": token(),
    "slime_mis": MIS,
    "slime_mis_veto": MIS | VETO,
}


@pytest.mark.parametrize("name", sorted({*PRESETS, *EXPECTED}))
def test_a_preset_is_valid_and_has_the_documented_settings(name):
    config = getattr(Config, name)()
    assert type(config) is Config
    config.validate()
    assert vars(config) == PLAIN | EXPECTED[name]


@pytest.mark.parametrize(
    ("call", "same"),
    [
        (
            Config.geo_rs(rs_threshold=1.001, veto_threshold=1e-4),
            rejects("seq_mean_k1", 1.001) | VETO,
        ),
        (Config.pg_rs(veto_threshold=None), REINFORCE | GEO),
        (
            Config.seq_is_rs(is_threshold=2.0, rs_threshold=2.0),
            sequence() | rejects("seq_sum_k1", 2.0),
        ),
        (
            Config.decoupled_seq_is_rs(3.0, 4.0, 0.2),
            sequence(3.0) | rejects("seq_sum_k1", 4.0, 0.2),
        ),
        (Config.seq_mis(threshold=3.0), sequence(3.0) | rejects("seq_sum_k1", 3.0, 0.0)),
        (Config.ppo_is_bypass(threshold=3.0), BYPASS | token(3.0)),
        (Config.decoupled_token_icepop(4.0, 0.25), token("0.25_4.0")),
        (Config.slime_mis_veto(veto_threshold=1e-6), MIS | {"rollout_token_veto_threshold": 1e-6}),
    ],
)
def test_calls_of_the_documents(call, same):
    call.validate()
    assert vars(call) == PLAIN | same
