// A click on a heading sorts the rows of each group. Rows that explain the one above them stay below it.
document.querySelectorAll("table").forEach((table) => {
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.classList.add("sortable");
    head.tabIndex = 0;
    const sort = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      for (const body of table.tBodies) sortBody(body, column, up ? 1 : -1);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); }
    });
  });
});

// A button copies what is in a box; the box can be selected without it.
document.querySelectorAll("details.copy").forEach((fold) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  const box = fold.querySelector("pre");
  const done = (worked) => { button.textContent = worked ? "Copied" : "Selected: press Ctrl+C"; };
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(box);
    if (!navigator.clipboard) { done(document.execCommand("copy")); return; }
    navigator.clipboard.writeText(box.textContent).then(() => done(true), () => done(false));
  });
  box.before(button);
});

// Everything is on paper, in browsers whose style sheets cannot open what is folded as well.
addEventListener("beforeprint", () => document.querySelectorAll("details:not([open])").forEach((fold) => {
  fold.open = true;
  addEventListener("afterprint", () => { fold.open = false; }, { once: true });
}));

function sortBody(body, column, sign) {
  const units = [];
  for (const row of [...body.rows]) {
    if (row.classList.contains("group")) continue;
    if (row.cells.length === 1 && units.length) units[units.length - 1].push(row);
    else units.push([row]);
  }
  const key = (unit) => {
    const cell = unit[0].cells[column];
    if (!cell) return null;
    return cell.dataset.v !== undefined ? Number(cell.dataset.v) : cell.classList.contains("n") ? null : cell.textContent;
  };
  const order = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
  };
  units.sort(order).forEach((unit) => body.append(...unit));
}
