// Turns the still picture of a timeline into one that moves. `data` is written by player.py.
(function (id, data) {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const LEFT = 62, CHART = 590, TOP = 22, WIDTH = 892, SECONDS_PER_EVENT = 0.4;
  const ROW = Math.max(22, Math.min(44, 320 / data.ranks));
  const right = LEFT + CHART, bottom = TOP + ROW * data.ranks;
  const x = (time) => LEFT + (CHART * time) / data.end;
  const middle = (rank) => TOP + ROW * (rank + 0.5);
  const spelled = (time) => (data.scale * time).toFixed(data.digits) + (data.unit ? " " + data.unit : "");

  function add(parent, tag, attributes, text) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  function element(parent, tag, properties) {
    const node = Object.assign(document.createElement(tag), properties);
    parent.appendChild(node);
    return node;
  }

  function drawPatterns(svg) {
    const definitions = add(svg, "defs", {});
    for (const [kind, look] of Object.entries(data.looks)) {
      const pattern = add(definitions, "pattern", {
        id: `${id}-${kind}`, width: 6, height: 6, patternUnits: "userSpaceOnUse",
      });
      add(pattern, "rect", { width: 6, height: 6, fill: look.colour });
      const strokes = { "/": "M0 6L6 0", ".": "M2 2h2v2h-2z", x: "M0 6L6 0M0 0L6 6" };
      if (look.hatch) add(pattern, "path", { d: strokes[look.hatch], stroke: "#fff", "stroke-opacity": 0.5 });
    }
  }

  // The labels of the boxes lie above the veil over what has not begun, so that they can be read there.
  function drawChart(svg, labels) {
    for (let rank = 0; rank < data.ranks; rank += 1) {
      add(svg, "text", { x: 2, y: middle(rank) + 4, "font-size": 12 }, `rank ${rank}`);
      add(svg, "rect", { x: LEFT, y: TOP + ROW * rank + 2, width: CHART, height: ROW - 4, fill: "#ECECEC" });
    }
    for (const span of data.spans) {
      const high = (ROW - 4) / span.parts.length;
      span.parts.forEach((part, i) => {
        const width = x(span.end) - x(span.start), y = TOP + ROW * span.rank + 2 + high * i;
        add(svg, "rect", {
          x: x(span.start), y, width, height: high, fill: `url(#${id}-${part.kind})`, stroke: "#fff", "stroke-width": 0.7,
        });
        for (const label of [part.name, part.short]) {
          const size = Math.min(11, high - 1);
          if (size >= 7 && width > 0.66 * size * label.length + 2) {
            add(labels, "text", {
              x: x(span.start) + width / 2, y: y + high / 2 + 0.36 * size, "font-size": size, "text-anchor": "middle",
            }, label);
            break;
          }
        }
      });
    }
  }

  // What a rank holds at a time, in the order of stages and microbatches, as far as there is room.
  function holding(rank, time) {
    const held = data.held.filter((each) => each.rank === rank && each.start <= time && time < each.end);
    let text = `${held.length}`;
    let shown = 0;
    for (const each of held) {
      const longer = `${text}${shown ? " " : ": "}${each.name}`;
      if (longer.length > 31) break;
      text = longer;
      shown += 1;
    }
    return shown < held.length ? `${text} …` : text;
  }

  const underWay = (time) => data.messages.filter((each) => each.sent <= time && time <= each.taken && time > 0);

  function drawMessages(layer, time) {
    layer.replaceChildren();
    const before = {}; // how many there are beside it already
    underWay(time).forEach((message) => {
      const whole = message.there - message.sent;
      const done = whole > 0 ? Math.min(1, (time - message.sent) / whole) : 1;
      const from = middle(message.from), to = middle(message.to);
      const y = from + (to - from) * done;
      const beside = `${Math.round(y / ROW)} ${message.forward}`;
      before[beside] = (before[beside] ?? -1) + 1;
      const at = x(time) + (message.forward ? 1 : -1) * (10 + 20 * before[beside]);
      const ink = message.forward ? data.looks.F.colour : data.looks.B.colour;
      add(layer, "path", { d: `M${at} ${from}V${to}`, stroke: "#000", "stroke-dasharray": message.forward ? "" : "3 2" });
      const shape = message.forward ? `M${at - 9} ${y - 8}h18v16h-18z` : `M${at} ${y - 11}l11 11l-11 11l-11 -11z`;
      add(layer, "path", { d: shape, fill: ink, stroke: "#000", "stroke-width": 1.2 });
      add(layer, "text", { x: at, y: y + 3.5, "font-size": 9, "text-anchor": "middle" }, message.microbatch);
    });
  }

  function start(root) {
    root.dataset.ready = "yes";
    root.replaceChildren();
    root.tabIndex = 0;
    element(root, "p", { className: "cpp-title", textContent: data.title });
    const svg = add(root, "svg", { viewBox: `0 0 ${WIDTH} ${bottom + 22}`, role: "img", "aria-label": data.alt });
    drawPatterns(svg);
    add(svg, "text", { x: right + 10, y: 13, "font-size": 12, "font-weight": "bold" }, "holds");
    const labels = add(svg, "g", {});
    drawChart(svg, labels);
    const holds = Array.from({ length: data.ranks }, (_, rank) =>
      add(svg, "text", { x: right + 10, y: middle(rank) + 4, "font-size": 12 }));
    const veil = add(svg, "rect", { y: TOP, height: bottom - TOP, fill: "#fff", "fill-opacity": 0.62 });
    svg.append(labels);
    const frames = add(svg, "g", {});
    const cursor = add(svg, "path", { stroke: "#000", "stroke-width": 2 });
    const clock = add(svg, "text", { y: bottom + 16, "font-size": 12, "text-anchor": "middle", "font-weight": "bold" });
    const layer = add(svg, "g", {});
    const bar = element(root, "div", { className: "cpp-bar" });
    const button = (text, label, does) => {
      const node = element(bar, "button", { type: "button", textContent: text });
      node.setAttribute("aria-label", label);
      node.addEventListener("click", does);
      return node;
    };
    button("|◀", "to the start", () => go(0));
    button("◀|", "one step back", () => step(-1));
    const play = button("▶ play", "play", () => toggle());
    button("▶|", "one step on", () => step(1));
    const slider = element(bar, "input", { type: "range", min: 0, max: 1000, step: 1, value: 0 });
    slider.setAttribute("aria-label", "time");
    slider.addEventListener("input", () => go((slider.value / 1000) * data.end));
    const now = element(root, "div", { className: "cpp-now" });
    now.setAttribute("aria-live", "polite");
    element(root, "div", {
      className: "cpp-keys",
      textContent: "Keys: space plays and pauses, ← and → step, Home and End. Small box: an activation, diamond: a gradient, sent and not yet taken.",
    });

    let time = 0, running = 0, last = 0;

    // While it plays, only what moves is redrawn; words wait for a pause, or a screen reader would never stop.
    function draw() {
      veil.setAttribute("x", x(time));
      veil.setAttribute("width", Math.max(0, right - x(time)));
      cursor.setAttribute("d", `M${x(time)} ${TOP - 4}V${bottom + 3}`);
      clock.setAttribute("x", Math.min(right, Math.max(LEFT, x(time))));
      clock.textContent = spelled(time);
      frames.replaceChildren();
      for (const span of working()) {
        add(frames, "rect", {
          x: x(span.start), y: TOP + ROW * span.rank + 2, width: x(span.end) - x(span.start), height: ROW - 4,
          fill: "none", stroke: "#000", "stroke-width": 2,
        });
      }
      holds.forEach((node, rank) => { node.textContent = holding(rank, time); });
      drawMessages(layer, time);
      slider.value = Math.round((1000 * time) / data.end);
      slider.setAttribute("aria-valuetext", spelled(time));
      if (!running) now.textContent = words();
    }

    const working = () => data.spans.filter((span) => span.start <= time && time < span.end);

    function words() {
      const busy = working().map((span) => `rank ${span.rank} ${span.parts.map((part) => part.name).join(" and ")}`);
      const sent = underWay(time).map((each) => `${each.what} of ${each.microbatch} to rank ${each.to}`);
      return `${spelled(time)}: ${busy.join(", ") || "nobody works"}. Sent, not yet taken: ${sent.join(", ") || "nothing"}.`;
    }

    function go(to) {
      time = Math.min(data.end, Math.max(0, to));
      draw();
    }

    function step(by) {
      pause();
      const small = data.end * 1e-9;
      const next = by > 0 ? data.events.find((each) => each > time + small)
        : data.events.findLast((each) => each < time - small);
      go(next === undefined ? (by > 0 ? data.end : 0) : next);
    }

    function pause() {
      cancelAnimationFrame(running);
      running = 0;
      play.textContent = "▶ play";
      play.setAttribute("aria-label", "play");
    }

    function toggle() {
      if (running) {
        pause();
        draw();
        return;
      }
      if (time >= data.end) time = 0;
      play.textContent = "❚❚ pause";
      play.setAttribute("aria-label", "pause");
      last = performance.now();
      running = requestAnimationFrame(tick);
    }

    const seconds = Math.min(30, Math.max(6, SECONDS_PER_EVENT * data.events.length));
    const jerky = matchMedia("(prefers-reduced-motion: reduce)").matches;
    function tick(stamp) {
      if (!root.isConnected) return pause();
      const passed = (stamp - last) / 1000;
      if (!jerky || passed > 0.8) {
        last = stamp;
        time = jerky ? data.events.find((each) => each > time) ?? data.end : time + (passed * data.end) / seconds;
        if (time >= data.end) {
          time = data.end;
          pause();
        }
        draw();
      }
      if (time < data.end) running = requestAnimationFrame(tick);
    }

    root.addEventListener("keydown", (event) => {
      const keys = { ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => go(0), End: () => go(data.end) };
      if (event.key === " " && event.target.tagName !== "BUTTON") keys[" "] = toggle;
      const does = keys[event.key];
      if (!does || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      does();
    });
    draw();
  }

  // A page may show one timeline twice, and may put a script to work before its output is in the page.
  function find(tries) {
    const roots = document.querySelectorAll(`[data-player="${id}"]:not([data-ready])`);
    roots.forEach(start);
    if (!roots.length && tries) setTimeout(() => find(tries - 1), 50);
  }
  find(40);
})
