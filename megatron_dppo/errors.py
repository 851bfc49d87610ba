"""The one exception whose message is all that a user sees."""


class UserError(Exception):
    """A mistake that the user can mend. It is printed once, by one rank, without a traceback.

    Args:
        setting: the setting (``layout.tp``) or the file at fault.
        value: what it holds.
        problem: what is wrong with that.
        remedy: what to do about it, as an instruction.
    """

    def __init__(self, setting: str, value: object, problem: str, remedy: str) -> None:
        self.setting, self.value, self.problem, self.remedy = setting, value, problem, remedy
        message = f"{setting} = {value}: {problem}. {remedy}."
        super().__init__(message.encode(errors="backslashreplace").decode())  # it may quote what no terminal can print

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, object, str, str]]:
        return type(self), (self.setting, self.value, self.problem, self.remedy)
