"""Programs that start unrelated ones: what two of their children do has nothing in common."""

from __future__ import annotations

_NAMES = frozenset(
    (
        # shells
        "sh", "ash", "bash", "busybox", "csh", "dash", "elvish", "fish", "ksh", "ksh93", "mksh",
        "nu", "pwsh", "rbash", "tcsh", "xonsh", "yash", "zsh",
        # sessions and terminals
        "screen", "SCREEN", "dtach", "abduco", "zellij", "byobu", "mosh-server", "sshd",
        "sshd-session", "login", "su", "sudo", "doas", "runuser", "script", "xterm", "konsole",
        "gnome-terminal-", "alacritty", "kitty", "wezterm-gui", "foot", "code", "code-server",
        "emacs", "vim", "nvim", "gnome-shell", "plasmashell", "Xorg",
        # managers of services and containers
        "systemd", "init", "(sd-pam)", "openrc-run", "supervisord", "s6-svscan", "s6-supervise",
        "runsv", "runsvdir", "tini", "dumb-init", "catatonit", "docker-init", "containerd-shim",
        "conmon", "crun", "runc", "lxc-start", "circusd", "honcho", "foreman", "overmind",
        "hivemind", "goreman", "monit", "cron", "crond", "atd", "anacron",
        # schedulers, and runners of jobs
        "slurmstepd", "slurmd", "srun", "salloc", "pbs_mom", "sge_shepherd", "condor_starter",
        "oarexec", "res", "sbatchd", "xargs", "parallel", "make", "gmake", "ninja", "just", "task",
        "Runner.Worker", "gitlab-runner", "buildkite-agent", "java",
        # notebooks
        "jupyter", "jupyter-lab", "jupyter-noteboo", "jupyter-notebook", "jupyter-server",
        "jupyterhub", "jupyterhub-sing", "jupyterhub-singleuser", "jupyter-labhub",
    )
)  # fmt: skip
_PREFIXES = "tmux", "containerd-shim", "PM2 ", "sshd", "jupyter-", "slurmstepd"


def starts_others(command: str) -> bool:
    """True if a program of this name starts unrelated ones, as a shell does.

    ``command`` is the kernel's name or a longer one.
    """
    return command in _NAMES or command.startswith(_PREFIXES)
