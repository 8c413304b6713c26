"""Builds a miniature AppWorld data root: 9 tasks, 3 scenarios of 3, one of each difficulty. Our own tasks and people.

Runs inside AppWorld's environment (`.venv-appworld/bin/python -P appworld_mini.py ROOT`) on AppWorld's own classes, so what it writes
is derived from AppWorld: it is generated where it is needed and never committed or published. Every split names the same
nine tasks: the set tests the machinery and says nothing about generalisation.
"""

# ruff: noqa: E501 - the gold solutions are programs, quoted whole
from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

NOW = datetime(2023, 5, 18, 12, 0, 0)
SPLITS = ("train", "dev", "test_normal", "test_challenge")
#: first name, last name, phone number, birthday; the first three are supervisors of one task a scenario
PEOPLE = (
    ("Nora", "Quill", "5550100001", "1990-03-02"),
    ("Ivo", "Marsh", "5550100002", "1988-11-21"),
    ("Tess", "Alder", "5550100003", "1995-07-14"),
    ("Remy", "Stone", "5550100004", "1991-01-30"),
    ("Lena", "Frost", "5550100005", "1986-09-09"),
    ("Otis", "Bloom", "5550100006", "1993-12-05"),
)
ACCOUNTS = ("amazon", "file_system", "gmail", "phone", "simple_note", "splitwise", "spotify", "todoist", "venmo")
#: titles and contents of every supervisor's notes, of which one has the number that scenario 1 asks for
LOCKERS = ((412, 87, 3051), (908, 15, 2277), (634, 52, 1189))
#: who owes how much after the dinner of scenario 3, by indices into PEOPLE
DINNERS = (((3, 18), (4, 27)), ((4, 31), (5, 12)), ((3, 9), (5, 44)))
GIFTS = ((3, 25, "Cinema"), (4, 40, "Museum"), (5, 15, "Bakery"))
_LOGIN = """passwords = {p["account_name"]: p["password"] for p in apis.supervisor.show_account_passwords()}
    me = apis.supervisor.show_profile()
"""


def email(person: tuple[str, str, str, str]) -> str:
    return f"{person[0].lower()}.{person[1].lower()}@example.com"


def password(person: tuple[str, str, str, str], account: str) -> str:
    return f"{account[:3]}-{person[1].lower()}-{person[2][-2:]}"


def scenarios() -> list[dict[str, Any]]:
    """Every task as plain data: id, supervisor, instruction, gold solution, evaluation and its data."""
    tasks: list[dict[str, Any]] = []
    for n in range(3):
        me = PEOPLE[n]
        private = LOCKERS[n][1]
        tasks.append({
            "id": f"mini1aa_{n + 1}", "difficulty": 1, "supervisor": me, "apps": ["simple_note"],
            "instruction": "What is the locker number in my note titled 'Gym'?",
            "public": {}, "private": {"title": "Gym"}, "answer": str(private),
            "solution": _LOGIN + """    token = apis.simple_note.login(username=me["email"], password=passwords["simple_note"])["access_token"]
    found = apis.simple_note.search_notes(query="Gym", access_token=token)
    note = next(x for x in found if x["title"] == "Gym")
    text = apis.simple_note.show_note(note_id=note["note_id"], access_token=token)["content"]
    apis.supervisor.complete_task(answer=text.split("locker ")[1].split(".")[0])""",
            "tests": [
                ("assert answers match.", "no_op_fail",
                 "test.answer(models.end.supervisor.Task.all()[0].answer and "
                 "__import__('json').loads(models.end.supervisor.Task.all()[0].answer), ground_truth_answer)"),
                ("assert no model changes other than logins.", "no_op_pass",
                 "test.case(models.changed_model_names(ignore=['simple_note.User']), '==', set())"),
            ],
        })  # fmt: skip
        friend, amount, what = GIFTS[n]
        to = PEOPLE[friend]
        tasks.append({
            "id": f"mini2bb_{n + 1}", "difficulty": 2, "supervisor": me, "apps": ["phone", "venmo"],
            "instruction": f"Send ${amount} to {to[0]}, my friend, on Venmo with the description '{what}'.",
            "public": {"amount": amount, "what": what}, "private": {"to": email(to)}, "answer": None,
            "solution": _LOGIN + f"""    token = apis.phone.login(username=me["phone_number"], password=passwords["phone"])["access_token"]
    contact = apis.phone.search_contacts(query={to[0]!r}, access_token=token)[0]
    token = apis.venmo.login(username=me["email"], password=passwords["venmo"])["access_token"]
    apis.venmo.create_transaction(
        receiver_email=contact["email"], amount={amount}, description={what!r}, access_token=token
    )
    apis.supervisor.complete_task()""",
            "tests": [
                ("assert exactly one transaction was sent.", "no_op_fail",
                 "test.case(len(models.end.venmo.Transaction.all()), '==', 1)"),
                ("assert it went from the supervisor to the friend.", "no_op_fail",
                 "sent = models.end.venmo.Transaction.all()[0]; "
                 "test.case([models.end.venmo.User.find_one(id=sent.sender_id).email, "
                 "models.end.venmo.User.find_one(id=sent.receiver_id).email], '==', "
                 "[main_user.email, private_data.to])"),
                ("assert amount and description match.", "no_op_fail",
                 "sent = models.end.venmo.Transaction.all()[0]; "
                 "test.case([sent.amount, sent.description], '==', [public_data.amount, public_data.what])"),
            ],
        })  # fmt: skip
        owed = [(PEOPLE[i], amount) for i, amount in DINNERS[n]]
        tasks.append({
            "id": f"mini3cc_{n + 1}", "difficulty": 3, "supervisor": me, "apps": ["phone", "simple_note", "venmo"],
            "instruction": (
                "My note titled 'Dinner' says who owes me how much. Request the money from each of them on Venmo with "
                "the description 'Dinner', then pin the note."
            ),
            "public": {"what": "Dinner"}, "private": {"owed": sorted([email(p), a] for p, a in owed)}, "answer": None,
            "solution": _LOGIN + """    notes = apis.simple_note.login(username=me["email"], password=passwords["simple_note"])["access_token"]
    note = next(x for x in apis.simple_note.search_notes(query="Dinner", access_token=notes) if x["title"] == "Dinner")
    text = apis.simple_note.show_note(note_id=note["note_id"], access_token=notes)["content"]
    phone = apis.phone.login(username=me["phone_number"], password=passwords["phone"])["access_token"]
    venmo = apis.venmo.login(username=me["email"], password=passwords["venmo"])["access_token"]
    for line in text.splitlines():
        name, amount = line.split(" owes $")
        contact = apis.phone.search_contacts(query=name, access_token=phone)[0]
        apis.venmo.create_payment_request(
            user_email=contact["email"], amount=int(amount), description="Dinner", access_token=venmo
        )
    apis.simple_note.update_note(note_id=note["note_id"], pinned=True, access_token=notes)
    apis.supervisor.complete_task()""",
            "tests": [
                ("assert the requests are those of the note.", "no_op_fail",
                 "test.case(sorted([models.end.venmo.User.find_one(id=r.receiver_id).email, r.amount] "
                 "for r in models.end.venmo.PaymentRequest.all()), '==', [list(x) for x in private_data.owed])"),
                ("assert every description matches.", "no_op_pass",
                 "test.case({r.description for r in models.end.venmo.PaymentRequest.all()} - {public_data.what}, "
                 "'==', set())"),
                ("assert the note is pinned.", "no_op_fail",
                 "test.case(models.end.simple_note.Note.find_one(title='Dinner', user_id="
                 "models.end.simple_note.User.find_one(email=main_user.email).id).pinned, '==', True)"),
            ],
        })  # fmt: skip
    return tasks


def evaluation_code(tests: list[tuple[str, str, str]]) -> str:
    lines = ["def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):"]
    for requirement, _, code in tests:
        lines += [f"    with test({requirement!r}):"] + [f"        {part}" for part in code.split("; ")]
    return "\n".join(lines) + "\n"


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1) + "\n")


def build(root: Path) -> int:
    """Write ROOT/data anew; the number of tasks."""
    from appworld import update_root
    from appworld.apps import get_all_apps
    from appworld.apps.api_lib import set_local_date_and_time, unset_local_date_and_time
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.collections.models import ModelCollection
    from appworld.common.constants import CANARY_STRING, DB_VERSION

    update_root(str(root))
    data = root / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    (root / "experiments" / "outputs").mkdir(parents=True, exist_ok=True)
    apps = get_all_apps()
    docs = ApiDocCollection.build(load_apps=tuple(a for a in apps if a != "admin"))
    for app, apis in docs.items():
        named = {name: {**doc, "canary_string": CANARY_STRING} for name, doc in apis.items()}
        write(data / "api_docs" / "standard" / f"{app}.json", named)
    freezer = set_local_date_and_time(NOW)
    try:
        base = ModelCollection.load(to_db_home_path=":memory:base", load_apps=list(apps), create_db=True)
        _fill(base, docs)
        base.save(db_home_path=str(data / "base_dbs"), format="full", delete_if_exists=True)
        tasks = scenarios()
        for task in tasks:
            _task(data / "tasks" / task["id"], task, list(apps), CANARY_STRING, DB_VERSION)
    finally:
        unset_local_date_and_time(freezer)
    for split in SPLITS:
        write(data / "datasets" / f"{split}.txt", "\n".join(t["id"] for t in tasks) + "\n")
    return len(tasks)


def _fill(base: Any, docs: Any) -> None:
    for person in PEOPLE:
        user = base.admin.MainUser.create_save(
            first_name=person[0], last_name=person[1], email=email(person), phone_number=person[2], birthday=person[3]
        )
        for account in ACCOUNTS:
            secret = password(person, account)
            base.admin.AccountPassword.create_save(main_user_id=user.id, account_name=account, password=secret)
            address = {"phone_number": person[2]} if account == "phone" else {"email": email(person)}
            money = {"venmo_balance": 500.0} if account == "venmo" else {}
            base[account].User.create_save(
                first_name=person[0], last_name=person[1], password=secret, verified=True, **address, **money
            )
    for doc in (doc for apis in docs.values() for doc in apis.values()):
        fields = {k: v for k, v in doc.items() if k != "app_name"}
        base.api_docs.ApiDoc.create_save(app_name_=doc["app_name"], **fields)
    for n, person in enumerate(PEOPLE[:3]):
        owner = base.simple_note.User.find_one(email=email(person))
        owed = "\n".join(f"{PEOPLE[i][0]} owes ${amount}" for i, amount in DINNERS[n])
        notes = {"Gym": f"My locker {LOCKERS[n][1]}. Towels are free.", "Dinner": owed}
        notes |= {f"Idea {k}": f"Number {LOCKERS[n][0] + k}. Nothing else." for k in range(6)}
        for title, content in notes.items():
            base.simple_note.Note.create_save(user_id=owner.id, title=title, content=content, pinned=False)
        phone = base.phone.User.find_one(phone_number=person[2])
        for friend in PEOPLE[3:]:
            base.phone.Contact.create_save(
                user_id=phone.id, first_name=friend[0], last_name=friend[1], email=email(friend),
                phone_number=friend[2], relationships=["friend"],
            )  # fmt: skip


def _task(folder: Path, task: dict[str, Any], apps: list[str], canary: str, version: str) -> None:
    from appworld.collections.models import ModelCollection

    person = task["supervisor"]
    world = ModelCollection.load(
        to_db_home_path=f":memory:task_input-{task['id']}",
        from_db_home_path=str(folder.parent.parent / "base_dbs"),
        load_apps=apps,
    )
    supervisor = world.supervisor.Supervisor.create_save(
        first_name=person[0], last_name=person[1], email=email(person), phone_number=person[2], birthday=person[3]
    )
    world.supervisor.Task.create_save(supervisor_id=supervisor.id, instruction=task["instruction"])
    for account in ACCOUNTS:
        world.supervisor.AccountPassword.create_save(
            supervisor_id=supervisor.id, account_name=account, password=password(person, account)
        )
    folder.mkdir(parents=True)
    world.save(
        db_home_path=str(folder / "dbs"), format="changes", app_names=apps, delete_if_exists=True,
        save_model_hashes=True,
    )  # fmt: skip
    world.close()
    who = {"first_name": person[0], "last_name": person[1], "email": email(person), "phone_number": person[2]}
    write(folder / "specs.json", {
        "instruction": task["instruction"], "supervisor": who, "datetime": NOW.isoformat(), "db_version": version,
        "canary_string": canary,
    })  # fmt: skip
    solution = f"def solution(apis, requester):\n    {task['solution']}\n"
    truth = folder / "ground_truth"
    metadata = {
        "mode": "full", "difficulty": task["difficulty"], "num_apps": len(task["apps"]),
        "num_apis": solution.count("apis."), "num_api_calls": solution.count("apis."),
        "num_solution_code_lines": solution.count("\n"),
    }  # fmt: skip
    for name, content in {
        "metadata": metadata, "public_data": task["public"], "private_data": task["private"],
        "answer": task["answer"], "required_apps": task["apps"],
        "test_data": [{"requirement": r, "label": label} for r, label, _ in task["tests"]],
    }.items():  # fmt: skip
        write(truth / f"{name}.json", content)
    write(truth / "evaluation.py", evaluation_code(task["tests"]))
    write(truth / "solution.py", solution)
    write(truth / "compiled_solution.py", solution)


if __name__ == "__main__":
    os.environ.setdefault("APPWORLD_CACHE", str(Path(sys.prefix) / "appworld-cache"))
    print(f"{build(Path(sys.argv[1]).absolute())} tasks")
